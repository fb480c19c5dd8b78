"""Logic of KV block transfer: connectors, tiers, leases and pulls."""
