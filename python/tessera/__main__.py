"""`python -m tessera`: the command."""
from tessera.launch import main

main()
