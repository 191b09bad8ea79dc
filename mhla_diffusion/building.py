"""One thread at a time builds models. Imports no torch.

Loading works by changes to all of PyTorch for as long as it takes: accelerate replaces `Module.register_parameter`,
transformers the default dtype and the initialisers. Two threads that load at once would give models without values, and
leave the process unable to build any. What builds models in this package holds `BUILDING`; code that loads stock models
in threads of its own can hold it as well.
"""

import threading

__all__ = ["BUILDING"]

BUILDING = threading.RLock()  # a pipeline loads its models under the same lock
