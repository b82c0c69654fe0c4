"""The package's version, which any module may import."""

__version__ = "0.1.0"
