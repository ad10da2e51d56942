"""Integrations: one module for each package, which the module requires."""
