"""Chapter 5 of Wu (2023): learning a step size, where its gradient fails, and where what was learned overfits."""
