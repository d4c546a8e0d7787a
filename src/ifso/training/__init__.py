"""Training and evaluating classifiers: the small part that pruning and fine-tuning need."""
