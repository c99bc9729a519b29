"""The engine: the only place where the host packages (memory, scheduling, decoding, speculation) and the device packages meet."""

import logging

# transformers says at its import that models need PyTorch; here it reads tokenizers, which do not.
logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in str(record.msg))
