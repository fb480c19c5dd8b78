"""Basics that workers share with features: messages between processes, failures, the device thread, results that come later."""
