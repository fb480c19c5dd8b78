"""Dashboard that the chart installs."""
