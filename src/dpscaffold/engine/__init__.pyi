from .batched import Engine as Engine
from .memory import Memory as Memory
from .oracle import Loop as Loop
from .state import Count as Count
from .state import Draw as Draw
from .state import Round as Round
from .state import RoundUploads as RoundUploads
from .state import State as State
