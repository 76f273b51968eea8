"""Inside of the CPU engine: what is put in place of SGLang's GPU parts, by concern.

- ``sgl_kernel_stub``: a package that stands in for the CUDA wheel ``sgl_kernel``
- ``kernels``: the few of its functions that speculative decoding calls, in plain torch
- ``attention``: an attention backend for every forward mode of EAGLE
- ``cuda_branches``: what lets a CPU take SGLang's branches for CUDA where it has none of its own
- ``common``, ``v0_5_9``, ``v0_5_13``, ``v0_5_16``: which SGLang modules get what, for all releases
  and by family, which has the name of its oldest
- ``hooks``: running those right after a module is imported
"""
