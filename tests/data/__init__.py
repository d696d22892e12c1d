"""Tests of `raysharding.data`."""
