"""Operations on an activation before its cast, which a cast kernel computes as it reads."""

from jaxfp8.prologues._prologue import RMSNorm as RMSNorm
from jaxfp8.prologues._prologue import SwiGLU as SwiGLU
