from .records import Records as Records
from .tables import Digest as Digest
from .tables import Federation as Federation
