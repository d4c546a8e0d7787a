"""What every room needs: files, JSON, tensors, batches, devices, processes. It imports torch at most."""
