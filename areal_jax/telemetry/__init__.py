"""What a run writes about itself: metrics, event journal, trace, live view."""
