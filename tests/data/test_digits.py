import torch

from layerwise import data


def test_shapes_and_range():
    x, y = data.digits()
    assert x.shape == (1797, 1, 8, 8)
    assert x.dtype == torch.float32
    assert (float(x.min()), float(x.max())) == (0.0, 1.0)
    assert sorted(set(y.tolist())) == list(range(10))


def test_limit_takes_the_first():
    whole, some = data.digits(), data.digits(limit=7)
    assert torch.equal(some.x, whole.x[:7])
    assert torch.equal(some.y, whole.y[:7])


def test_pixels_and_labels_are_scikit_learns():
    from sklearn.datasets import load_digits

    found = load_digits()
    given = data.digits()
    assert torch.equal(given.flat() * 16, torch.from_numpy(found.data).float())
    assert given.y.tolist() == found.target.tolist()
