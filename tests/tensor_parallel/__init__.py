"""Tests of the tensor-parallel layers."""
