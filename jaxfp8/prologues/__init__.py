"""Operations on an activation before its cast, which a cast kernel computes as it reads."""

from jaxfp8.prologues._rms_norm import RMSNorm as RMSNorm
from jaxfp8.prologues._swiglu import SwiGLU as SwiGLU
