//! Transactions: Burn's body reads tensor after tensor, in program order.

use burn_backend::Backend;
use burn_backend::ops::TransactionOps;

use crate::Spatial;

impl<B: Backend> TransactionOps<Self> for Spatial<B> {}
