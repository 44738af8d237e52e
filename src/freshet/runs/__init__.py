"""The run directory: the product's memory. Written by a driver, read by audit and reports."""
