from .run import Setting as Setting
