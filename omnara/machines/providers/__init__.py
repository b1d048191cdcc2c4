"""Where pool machines come from: one module for each kind of place, all behind `protocol.Provider`."""
