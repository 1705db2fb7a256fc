"""The tuner: a workload in, a recommendation with its reasoning out. No torch."""
