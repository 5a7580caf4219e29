"""The vendor's libraries, through every call form that torch offers."""

from kernels_vendor.torch_blas import Vendor

__all__ = ["Vendor"]
