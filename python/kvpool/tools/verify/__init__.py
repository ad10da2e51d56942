"""`kvpool verify`: whether every byte of a layout arrives where it belongs."""
