from .tables import Digest as Digest
from .tables import Federation as Federation
from .tables import Records as Records
