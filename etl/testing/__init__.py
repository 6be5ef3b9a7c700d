"""What third parties need to prove their connectors: contract suites to inherit, and small stand-ins of the runtime."""
