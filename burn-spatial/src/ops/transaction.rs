//! Transactions: Burn's body reads tensor after tensor, in program order.

use burn_backend::ops::TransactionOps;

use crate::Spatial;
use crate::kernels::LocalKernels;

impl<B: LocalKernels> TransactionOps<Self> for Spatial<B> {}
