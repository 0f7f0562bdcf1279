"""Kitty: accurate 2-bit KV-cache quantization for Hugging Face transformers."""
