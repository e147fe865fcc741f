"""Chapter 3 of Wu (2023): what a language model's logits know of a task, and when they need an anchor."""
