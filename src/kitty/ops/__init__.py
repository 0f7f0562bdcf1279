"""Operations on packed pages, each a folder: torch reference, Triton kernel, public function.

On CPU tensors they run the reference, on GPU tensors (or with ``TRITON_INTERPRET=1``) the kernel.
"""
