"""EngineCore: schedules and executes requests of one model on one device."""
