"""What ranks of any framework share: who has what, what crosses stages, consensus, launchers."""
