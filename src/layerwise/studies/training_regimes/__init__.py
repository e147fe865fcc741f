"""Chapter 5 of George (2023): what is learned first, in lazy training and in feature learning."""
