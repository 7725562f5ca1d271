from .records import Records as Records
from .schema import Target as Target
from .tables import Digest as Digest
from .tables import Federation as Federation
