"""Files of Hugging Face and PEFT, in and out."""
