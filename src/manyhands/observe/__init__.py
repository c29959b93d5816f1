"""What a run says about itself: events, and what is made of them."""
