package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	inferencev1 "penstock.io/protos/inference/v1"
)

// chatRequest returns a request to answer the message.
func (o options) chatRequest() *inferencev1.ChatRequest {
	var messages []*inferencev1.ChatMessage
	if o.system != "" {
		messages = append(messages, &inferencev1.ChatMessage{Role: "system", Content: o.system})
	}
	messages = append(messages, &inferencev1.ChatMessage{Role: "user", Content: o.texts[0]})
	return &inferencev1.ChatRequest{Model: o.model, Messages: messages, SamplingParams: o.params}
}

// chat prints the answer as it arrives.
func chat(ctx context.Context, c client) error {
	defer fmt.Println()
	ctx, cancel := withDeadline(ctx, c.timeout)
	defer cancel()
	stream, err := c.Chat(ctx, c.chatRequest())
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		fmt.Print(response.GetContent())
	}
}
