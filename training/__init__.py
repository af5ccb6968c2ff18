"""Training of the drafts that ship with edgellm's decoder plugins, and of a small hybrid model; see README.md.

Not part of any wheel.  Modules other than `prepare` and `target_file.pack` need torch, numpy and safetensors alone.
"""
