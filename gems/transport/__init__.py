"""Moving bytes between ranks, whatever they mean."""
