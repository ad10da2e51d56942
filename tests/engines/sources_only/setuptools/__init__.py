"""Stands for setuptools where the source of a package is fetched and not built."""
