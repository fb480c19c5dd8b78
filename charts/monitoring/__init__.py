"""What people look at: the dashboard that the chart installs."""
