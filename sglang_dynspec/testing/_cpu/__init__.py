"""Inside of the CPU engine: what is put in place of SGLang's GPU parts, by concern.

- ``sgl_kernel_stub``: a package that stands in for the CUDA wheel ``sgl_kernel``
- ``kernels``: the few of its functions that speculative decoding calls, in plain torch
- ``attention``: an attention backend for every forward mode of EAGLE
- ``common``, ``v0_5_9``, ``v0_5_20``: which SGLang modules get what, for all and by release family
- ``hooks``: running those right after a module is imported
"""
