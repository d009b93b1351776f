"""The contract of scale.py's operator: python -m pytest test_scale.py"""

from scale import scale

from extension_cpp.testing import Case, Contract, elementwise_samples


def samples(device, dtype):
    yield from zip(elementwise_samples(device, dtype), [1.5, 0.0, -2.25] * 5)


class TestScale(Contract):
    op = Case(scale, samples)
