"""Where weights come from: a local folder, a mounted claim, the Hugging Face hub."""
