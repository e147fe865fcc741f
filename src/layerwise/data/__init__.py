"""Data for experiments: scikit-learn's digits, MNIST and CIFAR-10 from parquet files, others from the hub."""

from layerwise.data.cifar10 import cifar10 as cifar10
from layerwise.data.digits import digits as digits
from layerwise.data.hub import hub as hub
from layerwise.data.images import Images as Images
from layerwise.data.mnist import mnist as mnist
