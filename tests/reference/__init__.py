"""Slow float64 truth that shares no code with what it is compared with, and a stand-in for CUDA graphs."""
