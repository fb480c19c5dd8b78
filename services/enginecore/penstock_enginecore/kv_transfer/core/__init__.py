"""Logic of KV block transfer: connectors, storage tiers, leases on blocks, and pulls of blocks from other engines."""
