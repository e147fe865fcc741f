"""What `benchmarks/cifar.py` trains: images on the device, a small fast network, its optimizers, and single runs."""
