"""Every torchvision builder and one network of each timm family, scored, pruned a little and trained on a device."""
