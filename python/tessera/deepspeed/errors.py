"""What tessera.deepspeed raises where DeepSpeed asserts."""
from tessera.errors import Error


class Refused(Error, AssertionError):
    """An Error, which DeepSpeed's users may catch as the AssertionError that it is there."""
