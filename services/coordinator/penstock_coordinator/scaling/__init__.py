"""What autoscalers are told: how loaded the pools of engines are, how many engines they want, whether they are in use."""
