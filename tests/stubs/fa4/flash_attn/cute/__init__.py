__version__ = "0.0.0"  # as the real package reports itself in every release

from .interface import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
