"""The contract table against the wheels of SGLang releases, none of which is installed.

``python -m wheels`` (``nox -s contract``) downloads them once, reads their sources with ``ast``,
and says for each release which names are not as the table says. Signatures and fields count as
failures. The functions that dynspec wraps or calls are compared with what they were in the release
that the tests have run on: a change there is a reason to look, and need not matter.
"""
