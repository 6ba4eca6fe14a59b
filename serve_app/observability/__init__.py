"""What can be seen of a running engine: leaves that read step records and events, and that nothing else needs."""
